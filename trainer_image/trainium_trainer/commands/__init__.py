"""Commands of `trainium-trainer`, a subject in each file; `options` has what they share."""
