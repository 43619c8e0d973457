"""Compare what faults cost a script of TRL here, under JobSet and under torchrun in plain pods, in one run."""
