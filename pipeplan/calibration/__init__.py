"""Calibration: measured timelines -> a calibration with the cost terms that they show (`documents.calibration`)."""
