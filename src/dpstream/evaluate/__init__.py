"""Compare mechanisms: runs under a ledger, errors, and the machine that they were measured on."""
