//! What a tree is made for, and what it may refuse.

use super::component::Component;
use super::node::NodeId;
use super::policy::Policy;
use super::span::Units;

/// When what is on the device is offered to the tier below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackupRule {
    /// Never, or (with `write_back`) when it has to leave.
    OnEviction,
    /// As soon as this many requests used a node.
    AfterHits(u32),
}

/// Which tier is below the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Below {
    /// None.
    #[default]
    Nothing,
    /// Host pages; stores are behind them (hierarchical mode).
    Host,
    /// Stores, to and from which device slots travel without a host tier (linker mode).
    Stores,
}

/// Recurrent states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateConfig {
    /// Tokens between the boundaries at which a request can leave a state; a multiple of the page.
    pub grid: usize,
    /// Device states that one path keeps; the shallowest go beyond it. None: no limit.
    pub per_path: Option<usize>,
}

/// Settings of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TreeConfig {
    /// Units in a page; at least 1.
    pub page_size: usize,
    /// What keys are counted in.
    pub units: Units,
    /// Which leaf leaves first.
    pub policy: Policy,
    /// Tokens that sliding-window attention looks back, the widest of all layers and of a draft model. None: no window component.
    pub window: Option<usize>,
    /// Recurrent states. None: no state component.
    pub states: Option<StateConfig>,
    /// The tier below the device.
    pub below: Below,
    /// When that tier is given what is here.
    pub backup: BackupRule,
    /// What leaves the device goes to the host first.
    pub write_back: bool,
}

impl Default for TreeConfig {
    fn default() -> Self {
        TreeConfig {
            page_size: 16,
            units: Units::Tokens,
            policy: Policy::Lru,
            window: None,
            states: None,
            below: Below::Nothing,
            backup: BackupRule::OnEviction,
            write_back: false,
        }
    }
}

impl TreeConfig {
    /// Says what cannot be used, if anything.
    pub fn check(&self) -> Result<(), TreeError> {
        let wrong = |problem: String| Err(TreeError::Config(problem));
        if self.page_size == 0 || u32::try_from(self.page_size).is_err() {
            return wrong(format!("a page of {} units: 1 to 2^32 - 1 are right", self.page_size));
        }
        if self.window == Some(0) {
            return wrong("a window of 0 tokens: at least 1 is right".to_owned());
        }
        if let Some(states) = self.states {
            if states.grid == 0 || !states.grid.is_multiple_of(self.page_size) {
                return wrong(format!(
                    "states every {} tokens: a multiple of the page ({}) is right",
                    states.grid, self.page_size
                ));
            }
            if self.units == Units::Bigrams {
                return wrong(
                    "states and keys of bigrams: a state ends at a token, so keys are counted in tokens".to_owned(),
                );
            }
        }
        if self.write_back && self.below != Below::Host {
            return wrong("write-back needs a host tier below the device".to_owned());
        }
        if self.backup == BackupRule::AfterHits(0) {
            return wrong("backup after 0 hits: at least 1 is right".to_owned());
        }
        Ok(())
    }

    /// Pages that the window before a boundary takes: rounded up, at least one.
    pub fn window_pages(&self) -> u32 {
        let tokens = self.window.unwrap_or(0);
        u32::try_from(tokens.div_ceil(self.page_size.max(1)).max(1)).unwrap_or(u32::MAX / 2)
    }
}

/// Why the tree refused a call. It changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TreeError {
    /// Settings that cannot be used.
    #[error("cache tree: {0}")]
    Config(String),
    /// A node that is gone.
    #[error("the cache tree has no node {0:?}")]
    UnknownNode(NodeId),
    /// Slots that do not fit the pages they are for.
    #[error("{component} slots: {found} given, {needed} needed", component = .component.as_str())]
    Shape {
        /// The component.
        component: Component,
        /// Slots given.
        found: usize,
        /// Slots that would be right.
        needed: usize,
    },
    /// A call about a node that the state of the node does not allow.
    #[error("node {node:?}: {problem}")]
    Refused {
        /// The node.
        node: NodeId,
        /// What stands against it.
        problem: &'static str,
    },
}
