"""How is the suite run? How many examples, what each test cost, how long it waits, time that jumps."""
