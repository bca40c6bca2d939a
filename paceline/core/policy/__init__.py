"""What decides: which guesses get a row, how long a step waits for more, and whether a draft is used. No torch."""
