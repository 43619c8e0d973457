"""What a model can do: generated answers, and the figures of a model beside those of the one it began from."""
