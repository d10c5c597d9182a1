//! Queue, scheduler, batches and sampling.
