//! An LLM serving engine whose KV cache outlives the process.
