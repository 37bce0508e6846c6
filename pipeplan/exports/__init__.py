"""Exports: plans as other systems read them."""
