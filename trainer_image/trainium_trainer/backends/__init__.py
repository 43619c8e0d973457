"""Devices behind one protocol; the only modules that may know a device library."""
