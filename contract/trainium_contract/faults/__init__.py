"""The one table of faults: a sign stands for a cause, a cause has responses, a budget and words for people.

Agent, operator and `docs/causes.md` read the same rows, so that training heals alike with and without an operator.

| file | rows |
|---|---|
| `causes.py` | cause -> blame, budget, whether its node is suspected, sentence, advice; in order of severity |
| `rules.py` | the rows of a job (`spec.recovery.rules`), which come before all others |
| `responses.py` | cause -> first response, response when it comes again; the only place of a response |
| `signs.py` | exit code, runtime status, kernel line, pod reason, condition, taint, label -> cause |
| `node_polarity.py` | condition -> which status is bad, and how bad |
| `classify.py` | the look-ups: rules of the job, then signs, then the rows of their causes |

Invariant: causes and exit codes cross the wire between agents and operators of different versions, so names and values
stay as they are.
"""
