//! Experts behind a router.

use kvdock_kernels::ops::{Activation, ElementOps, ExpertOps, ExpertWeights, Experts, RouteSpec, Routing, Scoring};
use kvdock_kernels::{Buf, KernelError, MatrixShape, Weight};

use super::super::device::{Arithmetic, CudaBuf, CudaDevice, CudaWeight, product, shape, size};
use super::super::driver::{Access, Arg, DevicePtr, Touch};
use super::super::memory::{Block, DeviceMemory};
use super::super::module::Extent;
use super::super::units::{Unit, format_name};
use super::{read, write};

/// The most experts of a row that can be put together.
const MOST_CHOSEN: usize = 64;
/// Pairs of a row and an expert, on average for each expert, up to which weights are read for a few of them at a time.
const FEW_PAIRS: usize = 4;

/// What is behind a [`Routing`].
struct CudaRouting {
    device: u64,
    /// `[rows, top_k]` u32.
    experts: Block,
    /// `[rows, top_k]` f32.
    weights: Block,
    pairs: usize,
}

/// What is behind [`Experts`].
struct CudaExperts {
    device: u64,
    experts: Vec<ExpertWeights>,
    activation: Activation,
    /// Addresses by expert: of a matrix each, of its scales, of its bias; gate's, up's and down's in turn.
    tables: DeviceMemory,
}

/// The matrix of each expert that is meant.
#[derive(Clone, Copy)]
enum Part {
    Gate,
    Up,
    Down,
}

impl Part {
    fn of(self, expert: &ExpertWeights) -> &(Weight, Option<Buf>) {
        match self {
            Self::Gate => &expert.gate,
            Self::Up => &expert.up,
            Self::Down => &expert.down,
        }
    }
}

impl CudaExperts {
    /// Where the addresses of matrices, scales and biases of `part` lie.
    fn table(&self, part: Part) -> [Arg; 3] {
        let count = self.experts.len();
        let table =
            |index: usize| Arg::read(self.tables.at() + ((part as usize * 3 + index) * count * 8) as u64, count * 8);
        [table(0), table(1), table(2)]
    }
}

/// Pairs of rows and experts, by expert.
struct Sorted {
    /// Where each expert's pairs begin, and the end.
    offsets: Arg,
    order: Arg,
    /// How many.
    pairs: usize,
}

impl CudaDevice {
    /// The product of a part of each expert with the rows of its pairs: `x` has a row for each `pairs_a_row` pairs.
    fn expert_product(
        &self,
        op: &'static str,
        experts: &CudaExperts,
        part: Part,
        (x, pairs_a_row): (DevicePtr, usize),
        sorted: &Sorted,
        out: DevicePtr,
    ) -> Result<(), KernelError> {
        let Some(first) = experts.experts.first() else { return Ok(()) };
        let (weight, bias) = part.of(first);
        let MatrixShape { rows: width, cols } = weight.shape();
        let count = experts.experts.len();
        let pairs = sorted.pairs;
        let [weights, scales, biases] = experts.table(part);
        let biases = if bias.is_some() { biases } else { Arg::Address(0) };
        let narrow = self.weight(op, weight)?.narrow.as_ref();
        let few = pairs <= FEW_PAIRS * count && self.arithmetic == Arithmetic::Fast;
        let by_rows = |name: String, unit| {
            let extent =
                Extent { grid: [width.div_ceil(8), pairs.div_ceil(4).min(64), count], threads: 256, shared: 0 };
            (unit, name, extent)
        };
        let (unit, name, extent) = match narrow {
            Some(narrow) => by_rows(format!("moe_matvec_{}", narrow.name()), Unit::Narrow),
            None if few => by_rows(format!("moe_matvec_{}", format_name(weight.format())), Unit::Gguf),
            None => {
                let unit = self.matmul(weight.format());
                let grid = [width.div_ceil(128), pairs.div_ceil(128).min(64), count];
                (unit, "matmul_grouped".to_owned(), Extent { grid, threads: 256, shared: 0 })
            }
        };
        let mut args = vec![weights];
        if let Some(narrow) = narrow {
            args.extend([scales, Arg::U32(narrow.scale_kind())]);
        }
        args.extend([
            biases,
            read(x, pairs / pairs_a_row * cols),
            sorted.offsets,
            sorted.order,
            write(out, pairs * width),
            size(op, "weight rows", width)?,
            size(op, "weight columns", cols)?,
            size(op, "pairs of a row", pairs_a_row)?,
        ]);
        let touches = |tell: &mut dyn FnMut(Touch)| {
            for expert in &experts.experts {
                let (weight, bias) = part.of(expert);
                if let Some(weight) = weight.downcast_ref::<CudaWeight>() {
                    weight.touches().into_iter().for_each(&mut *tell);
                }
                if let Some(bias) = bias.as_ref().and_then(Buf::downcast_ref::<CudaBuf>) {
                    tell(Touch { at: bias.memory.at(), len: 4 * width, access: Access::Read });
                }
            }
        };
        // SAFETY: experts are alike, and the buffers have room for all pairs.
        unsafe { self.run_touching(unit, &name, extent, &args, &touches) }
    }
}

impl ExpertOps for CudaDevice {
    fn group_experts(
        &self,
        experts: Vec<ExpertWeights>,
        activation: Activation,
        first: usize,
    ) -> Result<Experts, KernelError> {
        let op = "group_experts";
        let hidden = ExpertWeights::check_alike(&experts)?;
        let mut addresses = Vec::with_capacity(9 * experts.len());
        for part in [Part::Gate, Part::Up, Part::Down] {
            let weights = experts.iter().map(|expert| self.weight(op, &part.of(expert).0));
            let weights = weights.collect::<Result<Vec<_>, _>>()?;
            if weights.iter().any(|weight| weight.narrow_kind() != weights[0].narrow_kind()) {
                return Err(shape(op, "an expert", "the format of the others".into(), "another format".into()));
            }
            addresses.extend(weights.iter().map(|weight| weight.memory.at()));
            addresses.extend(weights.iter().map(|weight| weight.scales()));
            for expert in &experts {
                let (weight, bias) = part.of(expert);
                addresses.push(match bias {
                    Some(bias) => self.floats(op, "bias", bias, weight.shape().rows)?,
                    None => 0,
                });
            }
        }
        let tables = DeviceMemory::new(&self.driver, addresses.len() * 8, "addresses of experts")?;
        let bytes: Vec<u8> = addresses.iter().flat_map(|address| address.to_le_bytes()).collect();
        // SAFETY: the memory is new and as long as the bytes; whatever uses it is queued behind this.
        unsafe { self.uploads.send(&bytes, tables.at(), &self.order.enter(), op)? };
        let count = experts.len();
        Ok(Experts::from_parts(
            first,
            count,
            hidden,
            Box::new(CudaExperts { device: self.id, experts, activation, tables }),
        ))
    }

    fn route(&self, logits: &Buf, rows: usize, spec: &RouteSpec<'_>, ids: &[u32]) -> Result<Routing, KernelError> {
        let op = "route";
        spec.check(rows, ids)?;
        let RouteSpec { count, top_k, .. } = *spec;
        if top_k > MOST_CHOSEN {
            return Err(shape(op, "experts of a row", format!("at most {MOST_CHOSEN}"), top_k.to_string()));
        }
        let (need, pairs) = (product(op, &[rows, count])?, product(op, &[rows, top_k])?);
        let bias = match spec.bias {
            Some(bias) => read(self.floats(op, "bias", bias, count)?, count),
            None => Arg::Address(0),
        };
        let queue = self.order.enter();
        let (given, tokens) = match spec.by_token {
            Some(table) => {
                let table = self.indices(op, "the experts by token", table)?;
                let tokens = table.host.len() / top_k;
                if let Some((row, index)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= tokens) {
                    return Err(KernelError::Index { op, row, index: *index, rows: tokens });
                }
                (table.arg(), Some(self.send_words(op, ids, &queue)?))
            }
            None => (Arg::Address(0), None),
        };
        let (experts, weights) = (self.room(pairs)?, self.room(pairs)?);
        let (groups, chosen) = spec.groups.unwrap_or((1, 1));
        let scoring = match spec.scoring {
            Scoring::Softmax => 0,
            Scoring::SoftmaxOfChosen => 1,
            Scoring::Sigmoid => 2,
            Scoring::SqrtSoftplus => 3,
        };
        let args = [
            read(self.floats(op, "logits", logits, need)?, need),
            bias,
            tokens.as_ref().map_or(Arg::Address(0), |block| Arg::read(block.at(), 4 * ids.len())),
            given,
            write(experts.at(), pairs),
            write(weights.at(), pairs),
            size(op, "experts", count)?,
            size(op, "experts of a row", top_k)?,
            Arg::U32(scoring),
            size(op, "groups", groups)?,
            size(op, "groups", chosen)?,
            Arg::U32(u32::from(spec.renormalize)),
            Arg::F32(spec.factor),
        ];
        let extent = Extent { grid: [rows, 1, 1], threads: 32, shared: 4 * (2 * count + groups) };
        // SAFETY: all sizes have been checked; what is chosen by token lies within the table.
        unsafe { self.run(Unit::Moe, op, extent, &args)? };
        Ok(Routing::from_parts(rows, top_k, Box::new(CudaRouting { device: self.id, experts, weights, pairs })))
    }

    fn run_experts(
        &self,
        x: &Buf,
        rows: usize,
        routing: &Routing,
        experts: &Experts,
        out: &mut Buf,
    ) -> Result<(), KernelError> {
        let op = "run_experts";
        let chosen: Option<&CudaRouting> = routing.downcast_ref();
        let chosen = chosen.filter(|chosen| chosen.device == self.id).ok_or_else(|| self.foreign(op, "routing"))?;
        let group: Option<&CudaExperts> = experts.downcast_ref();
        let group = group.filter(|group| group.device == self.id).ok_or_else(|| self.foreign(op, "experts"))?;
        if routing.rows() != rows {
            return Err(shape(op, "rows", routing.rows().to_string(), rows.to_string()));
        }
        let (count, hidden, top_k, pairs) = (experts.count(), experts.hidden(), routing.top_k(), chosen.pairs);
        let width = group.experts.first().map_or(0, |expert| expert.gate.0.shape().rows);
        let need = product(op, &[rows, hidden])?;
        let (x, out) = (self.floats(op, "x", x, need)?, self.floats(op, "out", out, need)?);
        let picked = Arg::read(chosen.experts.at(), 4 * pairs);
        let (offsets, order) = (self.room(count + 1)?, self.room(pairs)?);
        let first = size(op, "the first expert's number", experts.first())?;
        let args = [picked, size(op, "pairs", pairs)?, first, write(offsets.at(), count + 1), write(order.at(), pairs)];
        let extent = Extent::line(if rows == 0 { 0 } else { count }, 256);
        // SAFETY: the blocks have room for what is written.
        unsafe { self.run(Unit::Moe, "moe_sort", extent, &args)? };
        let sorted = Sorted { offsets: read(offsets.at(), count + 1), order: read(order.at(), pairs), pairs };
        if pairs == 0 {
            return Ok(());
        }
        let mut gate = self.scratch(product(op, &[pairs, width])?)?;
        let up = self.scratch(pairs * width)?;
        let outputs = self.room(product(op, &[pairs, hidden])?)?;
        let at = |buf: &Buf| self.floats(op, "work space", buf, pairs * width);
        self.expert_product(op, group, Part::Gate, (x, top_k), &sorted, at(&gate)?)?;
        self.expert_product(op, group, Part::Up, (x, top_k), &sorted, at(&up)?)?;
        self.activate(group.activation, &mut gate, &up, pairs * width)?;
        self.expert_product(op, group, Part::Down, (at(&gate)?, 1), &sorted, outputs.at())?;
        let args = [
            read(outputs.at(), pairs * hidden),
            picked,
            read(chosen.weights.at(), pairs),
            write(out, need),
            size(op, "experts of a row", top_k)?,
            size(op, "hidden", hidden)?,
            first,
            size(op, "experts", count)?,
        ];
        // SAFETY: as above.
        unsafe { self.run(Unit::Moe, "moe_combine", Extent::line(rows, 256), &args) }
    }

    fn add_gated(
        &self,
        y: &mut Buf,
        x: &Buf,
        gates: Option<&Buf>,
        rows: usize,
        width: usize,
    ) -> Result<(), KernelError> {
        let op = "add_gated";
        let need = product(op, &[rows, width])?;
        let gates = match gates {
            Some(gates) => read(self.floats(op, "gates", gates, rows)?, rows),
            None => Arg::Address(0),
        };
        let args = [
            write(self.floats(op, "y", y, need)?, need),
            read(self.floats(op, "x", x, need)?, need),
            gates,
            size(op, "width", width)?,
        ];
        // SAFETY: the buffers are as long as the kernel reads and writes.
        unsafe { self.run(Unit::Moe, "add_gated_rows", Extent::line(rows, 256), &args) }
    }
}
