"""The proposers' room: who guesses the next tokens, so that the target can verify several in one step."""
