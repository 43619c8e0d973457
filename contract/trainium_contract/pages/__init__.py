"""Render a job as HTML for files, browsers and notebooks. Pure: the time is an argument, and everything is escaped."""
