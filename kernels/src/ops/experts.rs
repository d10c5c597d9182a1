//! Experts behind a router.

use super::elements::{Activation, Indices};
use crate::device::{Buf, Weight};
use crate::error::KernelError;
use crate::handle::handle;

/// What a router's logits become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// The highest logits are chosen, and softmax is over those.
    SoftmaxOfChosen,
    /// Sigmoid of each logit.
    Sigmoid,
    /// `sqrt(softplus(logit))`.
    SqrtSoftplus,
}

/// How experts are chosen.
#[derive(Debug, Clone, Copy)]
pub struct RouteSpec<'a> {
    /// Experts there are.
    pub count: usize,
    /// Experts that a row gets.
    pub top_k: usize,
    /// What logits become.
    pub scoring: Scoring,
    /// Added to scores for the choice only, `count` long.
    pub bias: Option<&'a Buf>,
    /// Groups of experts, and how many groups are chosen from.
    pub groups: Option<(usize, usize)>,
    /// Chosen weights are divided by their sum.
    pub renormalize: bool,
    /// Factor on the weights.
    pub factor: f32,
    /// The experts of each token id, `[vocabulary, top_k]`, instead of a choice.
    pub by_token: Option<&'a Indices>,
}

handle! {
    /// The experts of each row and their weights.
    Routing {
        /// Rows.
        rows: usize,
        /// Experts of a row.
        top_k: usize,
    }
}

/// A gated MLP that is one of several.
pub struct ExpertWeights {
    /// `[width, hidden]`, with its bias.
    pub gate: (Weight, Option<Buf>),
    /// `[width, hidden]`, with its bias.
    pub up: (Weight, Option<Buf>),
    /// `[hidden, width]`, with its bias.
    pub down: (Weight, Option<Buf>),
}

handle! {
    /// Experts of one shape.
    Experts {
        /// The number of the first one.
        first: usize,
        /// How many.
        count: usize,
        /// Elements of a row.
        hidden: usize,
    }
}

/// Operations of layers with experts.
pub trait ExpertOps {
    /// Takes experts, which are all alike in shapes, formats and whether they have biases, and numbered from `first` on.
    fn group_experts(
        &self,
        experts: Vec<ExpertWeights>,
        activation: Activation,
        first: usize,
    ) -> Result<Experts, KernelError>;

    /// Picks experts for each row of `logits` `[rows, spec.count]`. `ids` are the rows' tokens.
    fn route(&self, logits: &Buf, rows: usize, spec: &RouteSpec<'_>, ids: &[u32]) -> Result<Routing, KernelError>;

    /// `out = Σ weight · expert(x)`, for each row over those of its experts that are among `experts`, in order of their numbers.
    fn run_experts(
        &self,
        x: &Buf,
        rows: usize,
        routing: &Routing,
        experts: &Experts,
        out: &mut Buf,
    ) -> Result<(), KernelError>;

    /// `y[r, :] += sigmoid(gates[r]) · x[r, :]`, without gates `y += x`, for rows of `width` elements.
    fn add_gated(
        &self,
        y: &mut Buf,
        x: &Buf,
        gates: Option<&Buf>,
        rows: usize,
        width: usize,
    ) -> Result<(), KernelError>;
}

fn refuse<T>(op: &'static str, what: &'static str, expected: String, found: String) -> Result<T, KernelError> {
    Err(KernelError::Shape { op, what, expected, found })
}

impl RouteSpec<'_> {
    /// Checks sizes against each other and against the rows' tokens. For implementers of [`ExpertOps`].
    ///
    /// # Errors
    /// What does not fit.
    pub fn check(&self, rows: usize, ids: &[u32]) -> Result<(), KernelError> {
        let op = "route";
        let (count, top_k) = (self.count, self.top_k);
        if top_k == 0 || top_k > count {
            return refuse(op, "experts of a row", format!("1 to {count}"), top_k.to_string());
        }
        if let Some((groups, chosen)) = self.groups
            && (groups == 0 || !count.is_multiple_of(groups) || chosen > groups || chosen * (count / groups) < top_k)
        {
            let expected = format!("groups of {count} experts that leave {top_k} to choose");
            return refuse(op, "groups", expected, format!("{groups}, {chosen} kept"));
        }
        if self.by_token.is_some() && ids.len() < rows {
            return refuse(op, "tokens", format!("{rows} of them"), ids.len().to_string());
        }
        Ok(())
    }
}

impl ExpertWeights {
    /// Checks that experts are alike and fit together; gives the elements of a row. For implementers of [`ExpertOps`].
    ///
    /// # Errors
    /// What does not fit.
    pub fn check_alike(experts: &[Self]) -> Result<usize, KernelError> {
        let op = "group_experts";
        let Some(first) = experts.first() else {
            return refuse(op, "experts", "at least one".into(), "none".into());
        };
        let about =
            |(weight, bias): &(Weight, Option<Buf>)| (weight.shape(), weight.format(), bias.as_ref().map(Buf::len));
        let all = |expert: &Self| (about(&expert.gate), about(&expert.up), about(&expert.down));
        if let Some(other) = experts.iter().find(|expert| all(expert) != all(first)) {
            return refuse(op, "an expert", format!("{:?}", all(first)), format!("{:?}", all(other)));
        }
        let (gate, up, down) = (first.gate.0.shape(), first.up.0.shape(), first.down.0.shape());
        if up != gate || (down.rows, down.cols) != (gate.cols, gate.rows) {
            let expected = format!("{} x {} up and its reverse down", gate.rows, gate.cols);
            return refuse(op, "an expert", expected, format!("{up:?} and {down:?}"));
        }
        Ok(gate.cols)
    }
}
