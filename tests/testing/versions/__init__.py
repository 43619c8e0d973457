"""What did the version before do? Its code out of git, its releases, and what each version writes for the other."""
