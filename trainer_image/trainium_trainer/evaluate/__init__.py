"""Evaluate a model: generate answers, and compare its figures with those of its base.

    evaluate_artifacts      stage.py     choose the models, and reuse an earlier result of the same inputs
    read_held_out_examples  held_out.py  read the prompts with expected answers
    compare                 compare.py   score each model on the ranks that can load it
    score_model             scoring.py   compute likelihoods and answers of batches (answering/)
    build_figures           report.py    average the scores, with standard errors, before and after
    EvaluationResult        report.py    write JSON, Markdown, model cards and the results of the run

`tasks.py` measures the same models by lm-evaluation-harness.
"""
