"""A job as HTML, for files, browsers and notebooks. Pure: the time is given, and everything is escaped."""
