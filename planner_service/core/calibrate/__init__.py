"""Calibrate: measured timelines -> a calibration, the cost terms that they show (`cost.calibration`)."""
