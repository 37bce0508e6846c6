"""Calibration: measured timelines -> a calibration, the cost terms that they show (`documents.calibration`)."""
