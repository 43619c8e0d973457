"""Commands of `trainium-trainer`, one subject per file; `options` has the shared options."""
