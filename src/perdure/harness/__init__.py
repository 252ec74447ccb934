"""Floor 3: conversations, input, generation, tool calls, and what can be seen of them."""
