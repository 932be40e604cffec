"""What crosses the wire, as msgspec Structs: bodies validated once, answers in OpenAI's and vLLM's forms."""
