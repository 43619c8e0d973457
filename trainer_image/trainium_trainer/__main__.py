"""`python -m trainium_trainer` is `trainium-trainer`."""

from trainium_trainer.cli import main

if __name__ == "__main__":
    main()
