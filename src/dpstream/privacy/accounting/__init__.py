"""What privacy events amount to: curves, composition, calibration."""
