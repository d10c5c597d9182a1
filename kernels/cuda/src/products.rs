//! Matrix products: which kernel serves which weights and how many rows, and weights of eight and four bits.

use kvdock_kernels::{KernelError, MatrixShape, NarrowData, NarrowScales, Weight, WeightFormat};

use super::device::{Arithmetic, CudaDevice, CudaWeight, FEW_ROWS, Narrow, product, size};
use super::driver::Arg;
use super::memory::DeviceMemory;
use super::module::Extent;
use super::units::{Unit, format_name};

impl CudaDevice {
    /// The unit and the kernel of a product, with its extent.
    pub(super) fn product_kernel(&self, format: WeightFormat, out_rows: usize, rows: usize) -> (Unit, String, Extent) {
        if self.arithmetic == Arithmetic::Fast && rows <= FEW_ROWS {
            let extent = Extent::plane(out_rows.div_ceil(8), rows.div_ceil(4), 256);
            return (Unit::Gguf, format!("matvec_{}", format_name(format)), extent);
        }
        let unit = self.matmul(format);
        (unit, "matmul".to_owned(), Extent::plane(out_rows.div_ceil(128), rows.div_ceil(128), 256))
    }

    /// The unit of products on tensor cores.
    pub(super) fn matmul(&self, format: WeightFormat) -> Unit {
        let exact = self.arithmetic == Arithmetic::Reproducible || format == WeightFormat::F32;
        Unit::Matmul { format, parts: if exact { 2 } else { 1 } }
    }

    /// Takes weights of eight or four bits. As far as others can tell they have the format that holds all their values exactly.
    pub(super) fn take_narrow(&self, weight: &NarrowData<'_>) -> Result<Weight, KernelError> {
        let op = "upload_narrow";
        weight.check()?;
        let (scales, powers) = match weight.scales {
            NarrowScales::Floats(scales) => (scales.iter().flat_map(|scale| scale.to_le_bytes()).collect(), false),
            NarrowScales::Powers(scales) => (scales.to_vec(), true),
        };
        let memory = DeviceMemory::new(&self.driver, weight.bytes.len(), "a weight matrix")?;
        let of_scales = DeviceMemory::new(&self.driver, scales.len(), "scales of a weight matrix")?;
        let queue = self.order.enter();
        // SAFETY: the memory is new and as long as the bytes; whatever uses it is queued behind this.
        unsafe {
            self.uploads.send(weight.bytes, memory.at(), &queue, op)?;
            self.uploads.send(&scales, of_scales.at(), &queue, op)?;
        }
        let format = if powers { WeightFormat::BF16 } else { WeightFormat::F32 };
        let narrow = Some(Narrow { format: weight.format, scales: of_scales, powers });
        Ok(Weight::from_parts(weight.shape, format, Box::new(CudaWeight { device: self.id, memory, narrow })))
    }

    /// Queues a product whose sizes have been checked.
    pub(super) fn queue_product(
        &self,
        op: &'static str,
        (weight, inner): (&Weight, &CudaWeight),
        x: Arg,
        rows: usize,
        bias: Arg,
        out: Arg,
    ) -> Result<(), KernelError> {
        let MatrixShape { rows: width, cols } = weight.shape();
        let sizes = [size(op, "weight rows", width)?, size(op, "weight columns", cols)?, size(op, "rows", rows)?];
        let queue = self.order.enter();
        let (unit, name, extent) = self.product_kernel(weight.format(), width, rows);
        let Some(narrow) = &inner.narrow else {
            let args = [&[inner.memory.read(), x, bias, out][..], &sizes[..]].concat();
            // SAFETY: the caller has checked all sizes.
            return unsafe { self.kernels.launch(unit, &name, extent, &args, &queue) };
        };
        let matrix = [inner.memory.read(), narrow.scales.read(), Arg::U32(narrow.scale_kind())];
        if unit == Unit::Gguf {
            let args = [&matrix[..], &[x, bias, out], &sizes[..]].concat();
            let name = format!("matvec_{}", narrow.name());
            // SAFETY: as above.
            return unsafe { self.kernels.launch(Unit::Narrow, &name, extent, &args, &queue) };
        }
        let (kind, bytes) = if weight.format() == WeightFormat::BF16 { ("bf16", 2) } else { ("f32", 4) };
        let elements = product(op, &[width, cols])?;
        let wide = self.blocks.near(product(op, &[elements, bytes])?, "a widened weight matrix")?;
        let args = [&matrix[..], &[Arg::write(wide.at(), elements * bytes)], &sizes[..2]].concat();
        let name_of_wide = format!("dequant_{}_{kind}", narrow.name());
        let lines = Extent::line(elements.div_ceil(1024), 256);
        // SAFETY: the block has room for all elements; it is used in the queue's order.
        unsafe { self.kernels.launch(Unit::Narrow, &name_of_wide, lines, &args, &queue)? };
        let args = [&[Arg::read(wide.at(), elements * bytes), x, bias, out][..], &sizes[..]].concat();
        // SAFETY: as above.
        unsafe { self.kernels.launch(unit, &name, extent, &args, &queue) }
    }
}
