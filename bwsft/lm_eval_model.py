"""`python -m bwsft.lm_eval_model run ...`: lm-evaluation-harness with bwsft's models."""

from bwsft.evaluation.lm_eval import main

if __name__ == "__main__":
    main()
