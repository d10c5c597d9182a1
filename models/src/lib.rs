//! Model families, weight loaders, tokenizers and chat templates of kvdock.
