"""Object stores: S3 and what speaks its language, Google Cloud Storage, Azure."""
