"""Types that all policies share: the observation, actions, reasons, names, times, conditions."""
