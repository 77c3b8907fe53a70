"""Where models come from: a local directory, a name that is fetched once, or the Hugging Face Hub."""
