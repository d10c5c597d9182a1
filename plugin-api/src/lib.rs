//! The stable boundary between kvdock and its storage plugins.
