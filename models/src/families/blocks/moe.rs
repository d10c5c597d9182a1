//! Feed-forward blocks: the gated MLP, and experts behind a router.

use kvdock_kernels::ops::{Activation, ExpertWeights, Experts, Indices, RouteSpec, Scoring};
use kvdock_kernels::{Buf, Device, KernelError, Projection};

use super::Linear;
use crate::ModelError;

/// A gated MLP.
pub(crate) struct Mlp {
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
    pub(crate) activation: Activation,
}

impl Mlp {
    pub(crate) fn apply(&self, device: &dyn Device, x: &Buf, rows: usize) -> Result<Buf, ModelError> {
        let width = self.gate.rows();
        let len = rows * width;
        let (mut gate, mut up) = (device.scratch(len)?, device.scratch(len)?);
        let mut products = [
            Projection { weight: &self.gate.weight, bias: self.gate.bias.as_ref(), out: &mut gate },
            Projection { weight: &self.up.weight, bias: self.up.bias.as_ref(), out: &mut up },
        ];
        device.linear(x, rows, &mut products)?;
        device.activate(self.activation, &mut gate, &up, len)?;
        Ok(self.down.apply(device, &gate, rows)?)
    }
}

/// Picks experts for each row.
pub(crate) struct Router {
    /// `[experts, hidden]`.
    pub(crate) gate: Linear,
    pub(crate) scoring: Scoring,
    pub(crate) top_k: usize,
    /// Added to scores for the choice only.
    pub(crate) bias: Option<Buf>,
    /// Groups of experts, and how many groups are chosen from.
    pub(crate) groups: Option<(usize, usize)>,
    /// Chosen weights are divided by their sum.
    pub(crate) renormalize: bool,
    /// Factor on the weights.
    pub(crate) factor: f32,
    /// The experts of each token id, instead of a choice.
    pub(crate) by_token: Option<Indices>,
}

/// Experts behind a router, and an MLP that all rows share.
pub(crate) struct Moe {
    pub(crate) router: Router,
    /// The experts that this rank holds.
    pub(crate) experts: Experts,
    /// This rank's columns of the shared MLP.
    pub(crate) shared: Option<Mlp>,
    /// `[1, hidden]`: the shared MLP is weighted with the sigmoid of its product.
    pub(crate) shared_gate: Option<Linear>,
}

/// Hands experts, which are all alike and numbered from `first` on, over to the device.
pub(crate) fn group(device: &dyn Device, experts: Vec<Mlp>, first: usize) -> Result<Experts, KernelError> {
    let activation = experts.first().map_or(Activation::Silu, |expert| expert.activation);
    let parts = |linear: Linear| (linear.weight, linear.bias);
    let weights = experts.into_iter().map(|expert| ExpertWeights {
        gate: parts(expert.gate),
        up: parts(expert.up),
        down: parts(expert.down),
    });
    device.group_experts(weights.collect(), activation, first)
}

impl Moe {
    /// `y = shared(x) + Σ weight · expert(x)`, of what this rank holds. A row's experts are added in order of their numbers, whatever
    /// else is in the step. `ids` are the rows' tokens.
    pub(crate) fn apply(&self, device: &dyn Device, x: &Buf, rows: usize, ids: &[u32]) -> Result<Buf, ModelError> {
        let router = &self.router;
        let logits = router.gate.apply(device, x, rows)?;
        let spec = RouteSpec {
            count: router.gate.rows(),
            top_k: router.top_k,
            scoring: router.scoring,
            bias: router.bias.as_ref(),
            groups: router.groups,
            renormalize: router.renormalize,
            factor: router.factor,
            by_token: router.by_token.as_ref(),
        };
        let routing = device.route(&logits, rows, &spec, ids)?;
        let hidden = self.experts.hidden();
        let mut y = device.scratch(rows * hidden)?;
        device.run_experts(x, rows, &routing, &self.experts, &mut y)?;
        if let Some(shared) = &self.shared {
            let output = shared.apply(device, x, rows)?;
            let gates = match &self.shared_gate {
                Some(gate) => Some(gate.apply(device, x, rows)?),
                None => None,
            };
            device.add_gated(&mut y, &output, gates.as_ref(), rows, hidden)?;
        }
        Ok(y)
    }
}
