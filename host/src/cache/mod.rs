//! Radix tree, pools, tiers and the storage controller.
