"""Server: the engine behind HTTP, as OpenAI's API. Knows what requests mean; the texts are decode's."""
