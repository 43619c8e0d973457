"""How is the suite run? How many examples, what each test cost, time that jumps."""
