"""The words that all rooms share: what is seen, what is asked for, reasons, names, times, conditions."""
