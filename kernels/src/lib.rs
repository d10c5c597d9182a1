//! The compute that kvdock's models are made of, behind one Device face.
