//! Rules of the linker face.

use super::Rule;

pub(super) const RULES: &[Rule] = &[];
