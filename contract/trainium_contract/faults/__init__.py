"""The one table of faults: a sign has a cause, a cause has responses, a budget and texts.

Agent, operator and `docs/causes.md` read the same rows, so that training recovers in the same way with and without an
operator.

| file | rows |
|---|---|
| `causes.py` | cause -> blame, budget, whether its node is suspected, sentence, advice; in order of severity |
| `rules.py` | the rows of a job (`spec.recovery.rules`), which precede all others |
| `responses.py` | cause -> first and repeated response; the only place of a response |
| `signs.py` | exit code, runtime status, kernel line, pod reason, condition, taint, label -> cause |
| `node_polarity.py` | condition -> which status is bad, and how bad |
| `classify.py` | the look-ups: rules of the job, then signs, then the rows of their causes |

Invariant: causes and exit codes cross the wire between agents and operators of different versions, so names and values
never change.
"""
