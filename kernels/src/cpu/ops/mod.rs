//! The operations of [`crate::ops`] on the CPU, by [`crate::rowmath`]: orders of accumulation follow from the lengths of
//! rows alone.

mod elements;
mod experts;
mod rows;
mod states;
