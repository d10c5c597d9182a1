//! Tests that cross the rooms of kvdock.
