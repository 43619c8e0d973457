"""Measure costs as ratios to a floor, prove recovery and parity, and write the pages with the figures.

- `fleet`, `fleet.coordinator`, `elastic_cost`, `training_speed`: `make bench` (`benchmarks.run`) measures them,
  `benchmarks.report` writes docs/benchmarks.md, and `benchmarks.check` compares the first two with their thresholds.
- `faults`: the fault table, on a real or a development cluster (`make faults`), and the search for leaks (`make soak`).
- `proof`: kills of real ranks at seeded points (`make proof`).
- `parity`: curves and models beside `transformers`, `peft` and trl, in every layout (`make parity`).
- `program_recovery`: programs of others through faults (`make programs`), one of them also under peers of the operator.
- `rollouts`: ranks with servers of a role through faults, also as a JobSet.
- `elastic_grpo`: GRPO with killed ranks, answer by answer.

`harness` has what they share. Rows, suites and layouts are data in YAML; results are JSON beside the code that measured
them, with date, commit and machine, and pages are written from the results alone.
"""
