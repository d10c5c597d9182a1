//! Discovery, loading and life cycle of storage plugins.
