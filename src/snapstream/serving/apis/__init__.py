"""Other APIs than OpenAI's completions: thin layers over chat completions, which convert requests and answers."""
