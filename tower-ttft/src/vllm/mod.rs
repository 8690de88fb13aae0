//! What real vLLM speaks besides the OpenAI API.
