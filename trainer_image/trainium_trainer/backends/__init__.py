"""Devices behind one protocol; only these modules may depend on a device library."""
