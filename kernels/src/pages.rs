//! Pages of opaque bytes: pools whose rows are not plain heads of keys and values, such as compressed KV,
//! index keys, latents, rings of state and recurrent state.

use std::any::Any;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::error::KernelError;
use crate::kv::{KvDtype, Moment};

/// What memory is asked for.
const POOL: &str = "a pool of pages";

/// Geometry of a [`PagePool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageSpec {
    /// Buffers, one for each layer that has one.
    pub layers: usize,
    /// Bytes of a page in one layer.
    pub page_bytes: usize,
    /// Pages (or slots) in the pool.
    pub pages: usize,
}

/// `layers` buffers of `pages` pages each, which read as zero until they are written: in host memory, or in that of a device.
///
/// In host memory a pool costs nothing until it is written, and every layer has a lock of its own: a layer is copied to and from
/// elsewhere while another one is computed, and two threads never race for the same bytes, whatever pages they use.
pub struct PagePool {
    spec: PageSpec,
    memory: Memory,
}

enum Memory {
    Host(Vec<RwLock<Vec<u8>>>),
    Device(Box<dyn PageMemory>),
}

/// Memory of a device for a [`PagePool`]. Pages, layers and lengths have been checked when it is called; copies have been made
/// when the call returns, behind all operations of the device that were called before, or before the moment that is given.
pub trait PageMemory: Any + Send + Sync {
    /// For the device that made it.
    fn as_any(&self) -> &dyn Any;

    /// Copies layers of a page into `out`, one layer's bytes after another's.
    ///
    /// # Errors
    /// A failure of the device.
    fn copy_out(&self, page: u32, layers: std::ops::Range<usize>, out: &mut [u8]) -> Result<(), KernelError>;

    /// Copies `from`, one layer's bytes after another's, into layers of a page.
    ///
    /// # Errors
    /// A failure of the device.
    fn copy_in(
        &self,
        page: u32,
        layers: std::ops::Range<usize>,
        from: &[u8],
        moment: Option<&Moment>,
    ) -> Result<(), KernelError>;

    /// The point behind all operations of the device that were called before.
    ///
    /// # Errors
    /// A failure of the device.
    fn moment(&self) -> Result<Moment, KernelError>;

    /// Copies layers of page `from` to page `to`.
    ///
    /// # Errors
    /// A failure of the device.
    fn copy_page(&self, from: u32, to: u32, layers: std::ops::Range<usize>) -> Result<(), KernelError>;

    /// Writes zeros into all layers of a page.
    ///
    /// # Errors
    /// A failure of the device.
    fn clear_page(&self, page: u32) -> Result<(), KernelError>;
}

/// One layer of a pool, locked for reading.
pub struct LayerRef<'a> {
    bytes: RwLockReadGuard<'a, Vec<u8>>,
    page_bytes: usize,
}

/// One layer of a pool, locked for writing.
pub struct LayerMut<'a> {
    bytes: RwLockWriteGuard<'a, Vec<u8>>,
    page_bytes: usize,
}

impl PagePool {
    /// A pool of zeros.
    ///
    /// # Errors
    /// A size that is zero or does not fit in memory.
    pub fn new(spec: PageSpec) -> Result<Self, KernelError> {
        let bytes = Self::layer_bytes(&spec)?;
        let mut layers = Vec::with_capacity(spec.layers);
        for _ in 0..spec.layers {
            // Asked for first, so that too much is an error: a vector of zeros is taken from the system as such.
            Vec::<u8>::new().try_reserve_exact(bytes).map_err(|e| KernelError::Memory {
                what: POOL,
                bytes,
                reason: e.to_string(),
            })?;
            layers.push(RwLock::new(vec![0; bytes]));
        }
        Ok(Self { spec, memory: Memory::Host(layers) })
    }

    /// A pool in the memory of a device, which has `spec.layers` times [`PagePool::layer_bytes`] bytes of zeros. For implementers
    /// of [`crate::Device`].
    pub fn on_device(spec: PageSpec, memory: Box<dyn PageMemory>) -> Self {
        Self { spec, memory: Memory::Device(memory) }
    }

    /// Checks a geometry; gives the bytes of a layer.
    ///
    /// # Errors
    /// A size that is zero or can't be addressed.
    pub fn layer_bytes(spec: &PageSpec) -> Result<usize, KernelError> {
        for (what, n) in [("layers", spec.layers), ("page_bytes", spec.page_bytes), ("pages", spec.pages)] {
            if n == 0 {
                return Err(KernelError::Parameter { what, reason: "must be at least 1".into() });
            }
        }
        spec.pages
            .checked_mul(spec.page_bytes)
            .filter(|bytes| bytes.checked_mul(spec.layers).is_some_and(|all| isize::try_from(all).is_ok()))
            .filter(|_| u32::try_from(spec.pages).is_ok())
            .ok_or_else(|| KernelError::Memory {
                what: POOL,
                bytes: usize::MAX,
                reason: "the size overflows".to_owned(),
            })
    }

    /// What a device keeps the pages in; `None` for host memory.
    pub fn device_memory<T: 'static>(&self) -> Option<&T> {
        match &self.memory {
            Memory::Host(_) => None,
            Memory::Device(memory) => memory.as_any().downcast_ref(),
        }
    }

    /// The pool's geometry.
    pub fn spec(&self) -> &PageSpec {
        &self.spec
    }

    fn layer(&self, layer: usize) -> Result<&RwLock<Vec<u8>>, KernelError> {
        match &self.memory {
            Memory::Host(layers) => layers.get(layer).ok_or_else(|| self.no_layer(layer)),
            Memory::Device(_) => {
                let reason = "its bytes are in the memory of a device".to_owned();
                Err(KernelError::Page { op: "page pool", reason })
            }
        }
    }

    /// Locks a layer in host memory for reading.
    ///
    /// # Errors
    /// A layer that the pool does not have, a pool in the memory of a device.
    pub fn read(&self, layer: usize) -> Result<LayerRef<'_>, KernelError> {
        let lock = self.layer(layer)?;
        Ok(LayerRef { bytes: lock.read(), page_bytes: self.spec.page_bytes })
    }

    /// Locks a layer in host memory for writing.
    ///
    /// # Errors
    /// A layer that the pool does not have, a pool in the memory of a device.
    pub fn write(&self, layer: usize) -> Result<LayerMut<'_>, KernelError> {
        let lock = self.layer(layer)?;
        Ok(LayerMut { bytes: lock.write(), page_bytes: self.spec.page_bytes })
    }

    /// Copies one layer of a page into `out`, which is `page_bytes` long.
    ///
    /// # Errors
    /// A layer or page that the pool does not have, another length.
    pub fn copy_layer_out(&self, page: u32, layer: usize, out: &mut [u8]) -> Result<(), KernelError> {
        self.length("copy_layer_out", out.len())?;
        if let Memory::Device(memory) = &self.memory {
            self.check(page, layer)?;
            return memory.copy_out(page, layer..layer + 1, out);
        }
        out.copy_from_slice(self.read(layer)?.page(page)?);
        Ok(())
    }

    /// Copies `from`, which is `page_bytes` long, into one layer of a page.
    ///
    /// # Errors
    /// A layer or page that the pool does not have, another length.
    pub fn copy_layer_in(&self, page: u32, layer: usize, from: &[u8]) -> Result<(), KernelError> {
        self.copy_layer_in_after(None, page, layer, from)
    }

    /// The point behind all operations of the device that were called before.
    ///
    /// # Errors
    /// A failure of the device.
    pub fn moment(&self) -> Result<Moment, KernelError> {
        match &self.memory {
            Memory::Host(_) => Ok(Moment::from_parts(Box::new(()))),
            Memory::Device(memory) => memory.moment(),
        }
    }

    /// As [`PagePool::copy_layer_in`], beside what the device was told to compute after `moment`, which does not touch that layer of the page.
    ///
    /// # Errors
    /// As [`PagePool::copy_layer_in`].
    pub fn copy_layer_in_after(
        &self,
        moment: Option<&Moment>,
        page: u32,
        layer: usize,
        from: &[u8],
    ) -> Result<(), KernelError> {
        self.length("copy_layer_in", from.len())?;
        if let Memory::Device(memory) = &self.memory {
            self.check(page, layer)?;
            return memory.copy_in(page, layer..layer + 1, from, moment);
        }
        self.write(layer)?.page(page)?.copy_from_slice(from);
        Ok(())
    }

    /// Copies all layers of page `from` to page `to` of the same pool.
    ///
    /// # Errors
    /// A page that the pool does not have.
    pub fn copy_page(&self, from: u32, to: u32) -> Result<(), KernelError> {
        self.copy_page_layers(from, to, 0..self.spec.layers)
    }

    /// Copies one layer of page `from` to page `to` of the same pool.
    ///
    /// # Errors
    /// A layer or page that the pool does not have.
    pub fn copy_page_layer(&self, from: u32, to: u32, layer: usize) -> Result<(), KernelError> {
        self.copy_page_layers(from, to, layer..layer + 1)
    }

    fn copy_page_layers(&self, from: u32, to: u32, layers: std::ops::Range<usize>) -> Result<(), KernelError> {
        if let Memory::Device(memory) = &self.memory {
            for (page, layer) in [from, to].into_iter().flat_map(|page| layers.clone().map(move |layer| (page, layer)))
            {
                self.check(page, layer)?;
            }
            return if from == to { Ok(()) } else { memory.copy_page(from, to, layers) };
        }
        for layer in layers {
            let mut layer = self.write(layer)?;
            let bytes = layer.page(from)?.to_vec();
            layer.page(to)?.copy_from_slice(&bytes);
        }
        Ok(())
    }

    /// Writes zeros into all layers of a page.
    ///
    /// # Errors
    /// A page that the pool does not have.
    pub fn clear_page(&self, page: u32) -> Result<(), KernelError> {
        if let Memory::Device(memory) = &self.memory {
            self.check(page, 0)?;
            return memory.clear_page(page);
        }
        (0..self.spec.layers).try_for_each(|layer| {
            self.write(layer)?.page(page)?.fill(0);
            Ok(())
        })
    }

    fn check(&self, page: u32, layer: usize) -> Result<(), KernelError> {
        if layer >= self.spec.layers {
            return Err(self.no_layer(layer));
        }
        if page as usize >= self.spec.pages {
            return Err(no_page(page, self.spec.pages));
        }
        Ok(())
    }

    fn no_layer(&self, layer: usize) -> KernelError {
        let reason = format!("layer {layer}, but the pool has {}", self.spec.layers);
        KernelError::Page { op: "page pool", reason }
    }

    fn length(&self, op: &'static str, found: usize) -> Result<(), KernelError> {
        if found == self.spec.page_bytes {
            return Ok(());
        }
        let expected = format!("{} bytes", self.spec.page_bytes);
        Err(KernelError::Shape { op, what: "the length of a page", expected, found: found.to_string() })
    }
}

fn no_page(page: u32, pages: usize) -> KernelError {
    KernelError::Page { op: "page pool", reason: format!("page {page}, but the pool has {pages}") }
}

impl LayerRef<'_> {
    /// The bytes of a page.
    ///
    /// # Errors
    /// A page that the pool does not have.
    pub fn page(&self, page: u32) -> Result<&[u8], KernelError> {
        let pages = self.bytes.len() / self.page_bytes;
        self.bytes.chunks_exact(self.page_bytes).nth(page as usize).ok_or_else(|| no_page(page, pages))
    }
}

impl LayerMut<'_> {
    /// The bytes of a page.
    ///
    /// # Errors
    /// A page that the pool does not have.
    pub fn page(&mut self, page: u32) -> Result<&mut [u8], KernelError> {
        let pages = self.bytes.len() / self.page_bytes;
        self.bytes.chunks_exact_mut(self.page_bytes).nth(page as usize).ok_or_else(|| no_page(page, pages))
    }
}

/// Writes `values` as little-endian elements of `dtype`, rounded to nearest, halves to even. `out` holds as many
/// elements as there are values; what is longer is left alone.
pub fn encode_row(dtype: KvDtype, values: &[f32], out: &mut [u8]) {
    let size = dtype.bytes();
    for (value, out) in values.iter().zip(out.chunks_exact_mut(size)) {
        match dtype {
            KvDtype::F32 => out.copy_from_slice(&value.to_le_bytes()),
            KvDtype::F16 => out.copy_from_slice(&half::f16::from_f32(*value).to_le_bytes()),
            KvDtype::BF16 => out.copy_from_slice(&half::bf16::from_f32(*value).to_le_bytes()),
        }
    }
}

/// Reads what [`encode_row`] has written.
pub fn decode_row(dtype: KvDtype, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        KvDtype::F32 => {
            for (out, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*b);
            }
        }
        KvDtype::F16 => {
            for (out, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = half::f16::from_le_bytes(*b).to_f32();
            }
        }
        KvDtype::BF16 => {
            for (out, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = half::bf16::from_le_bytes(*b).to_f32();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEC: PageSpec = PageSpec { layers: 2, page_bytes: 8, pages: 3 };

    #[test]
    fn pages_and_layers_are_apart() {
        let pool = PagePool::new(SPEC).unwrap();
        pool.copy_layer_in(1, 0, &[7; 8]).unwrap();
        let mut out = [1; 8];
        for (page, layer, byte) in [(0, 0, 0), (1, 0, 7), (2, 0, 0), (1, 1, 0)] {
            pool.copy_layer_out(page, layer, &mut out).unwrap();
            assert_eq!(out, [byte; 8], "page {page} layer {layer}");
        }
        pool.copy_page(1, 2).unwrap();
        pool.clear_page(1).unwrap();
        assert_eq!(pool.read(0).unwrap().page(2).unwrap(), [7; 8]);
        assert_eq!(pool.read(0).unwrap().page(1).unwrap(), [0; 8]);
    }

    #[test]
    fn what_is_not_there_is_an_error() {
        let pool = PagePool::new(SPEC).unwrap();
        let e = pool.copy_layer_in(3, 0, &[0; 8]).unwrap_err().to_string();
        assert!(e.contains("page 3, but the pool has 3"), "{e}");
        let e = pool.copy_layer_in(0, 2, &[0; 8]).unwrap_err().to_string();
        assert!(e.contains("layer 2, but the pool has 2"), "{e}");
        let e = pool.copy_layer_in(0, 0, &[0; 9]).unwrap_err().to_string();
        assert!(e.contains("8 bytes") && e.contains('9'), "{e}");
        assert!(PagePool::new(PageSpec { pages: 0, ..SPEC }).is_err());
        assert!(PagePool::new(PageSpec { page_bytes: usize::MAX / 2, ..SPEC }).is_err());
    }

    #[test]
    fn rows_come_back_rounded() {
        let values = [1.0, -2.5, 1.0 + 1.0 / 512.0];
        for (dtype, last) in [(KvDtype::F32, values[2]), (KvDtype::F16, values[2]), (KvDtype::BF16, 1.0)] {
            let mut bytes = vec![0; 3 * dtype.bytes()];
            encode_row(dtype, &values, &mut bytes);
            let mut back = [0.0; 3];
            decode_row(dtype, &bytes, &mut back);
            assert_eq!(back, [1.0, -2.5, last], "{}", dtype.name());
        }
    }
}
