"""What `trainium-trainer` can be asked, one command a file; what is shared is in `options`."""
