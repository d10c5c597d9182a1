//! Weights of Hugging Face folders, in all the formats that the families beyond the dense one come in.
//!
//! Weights of eight and four bits stay as they are on a device that computes with such. Elsewhere they are widened when they
//! are loaded: to bf16 where that holds every value exactly (scales that are powers of two), else to f32. That costs memory,
//! not exactness.

use std::ops::Range;

use kvdock_kernels::ops::GroupedWeight;
use kvdock_kernels::{
    Buf, MatrixShape, NarrowData, NarrowFormat, NarrowScales, Weight, WeightData, WeightFormat, dequantize,
};
use safetensors::Dtype;

use super::Linear;
use super::narrow::{NarrowPart, bf16_bytes, e4m3, e8m0, mxfp4};
use super::share::{Cut, Share};
use crate::ModelError;
use crate::checkpoint::Checkpoint;
use crate::families::Build;
use crate::hf::{HfFolder, JsonFile, StoredTensor};

/// Loads tensors by name and shape.
pub(crate) struct Loader<'a> {
    build: &'a Build<'a>,
    folder: &'a HfFolder,
    /// Rows and columns that share a scale in fp8 weights.
    block: [usize; 2],
}

/// Values of a matrix, row by row.
pub(crate) struct Values {
    pub(crate) values: Vec<f32>,
    /// bf16 holds each of them.
    exact_in_bf16: bool,
}

impl<'a> Loader<'a> {
    /// A loader for the folder that is being built from. Of `quantization_config` it knows the methods in `methods`.
    pub(crate) fn new(build: &'a Build<'a>, methods: &[&str]) -> Result<Self, ModelError> {
        let path = build.checkpoint.config_path().to_path_buf();
        let Checkpoint::Hf(folder) = build.checkpoint else {
            return Err(ModelError::Unsupported { path, what: "this family in a GGUF file".to_owned() });
        };
        let config = folder.config();
        let mut block = [128, 128];
        if config.get("quantization_config").is_some() {
            let key = "quantization_config.quant_method";
            let method = config.required(key, "a text", |value| value.as_str())?;
            if !methods.contains(&method) {
                let known = if methods.is_empty() { "none for this family" } else { &methods.join(", ") };
                let what = format!("quantization_config with quant_method {method:?} (known: {known})");
                return Err(ModelError::Unsupported { path, what });
            }
            let key = "quantization_config.weight_block_size";
            let given = config.optional(key, "two counts above 0", |value| {
                let sizes: Option<Vec<u64>> = value.as_array()?.iter().map(|size| size.as_u64()).collect();
                let sizes: [u64; 2] = sizes?.try_into().ok()?;
                let [rows, cols] = sizes.map(|size| usize::try_from(size).unwrap_or_default());
                (rows > 0 && cols > 0).then_some([rows, cols])
            })?;
            block = given.unwrap_or(block);
        }
        Ok(Self { build, folder, block })
    }

    /// The folder's `config.json`.
    pub(crate) fn config(&self) -> &'a JsonFile {
        self.folder.config()
    }

    /// Which rank's part is loaded.
    pub(crate) fn share(&self) -> &'a Share {
        self.build.share
    }

    /// This rank's part of `total` things called `what`.
    pub(crate) fn deal(&self, total: usize, what: &str) -> Result<Range<usize>, ModelError> {
        self.build.share.deal(self.build.config_path(), total, what)
    }

    /// As [`Share::kv_heads`].
    pub(crate) fn deal_kv_heads(&self, kv_heads: usize) -> Result<Range<usize>, ModelError> {
        self.build.share.kv_heads(self.build.config_path(), kv_heads)
    }

    /// As [`Share::head_groups`].
    pub(crate) fn deal_head_groups(
        &self,
        heads: usize,
        groups: usize,
    ) -> Result<(Range<usize>, Range<usize>), ModelError> {
        self.build.share.head_groups(self.build.config_path(), heads, groups)
    }

    /// This rank's rows of a matrix with a row for each of `vocab` tokens.
    pub(crate) fn vocabulary(&self, name: &str, vocab: usize, hidden: usize) -> Result<Weight, ModelError> {
        let held = self.build.share.vocab(self.build.config_path(), vocab)?;
        self.part(name, (vocab, hidden), &Cut::Rows(held))
    }

    pub(crate) fn device(&self) -> &dyn kvdock_kernels::Device {
        self.build.device.as_ref()
    }

    pub(crate) fn has(&self, name: &str) -> Result<bool, ModelError> {
        Ok(self.folder.stored(name)?.is_some())
    }

    /// Fails where the checkpoint has a tensor of a layer beyond its `layers`: a model that is cut short answers nonsense.
    pub(crate) fn refuse_further_layer(&self, name: &str, layers: usize) -> Result<(), ModelError> {
        match self.folder.stored(name)? {
            Some(extra) => {
                Err(extra.error(format!("{layers} layers by the model's configuration"), "a tensor of a further layer"))
            }
            None => Ok(()),
        }
    }

    /// The tensor `name`, which must be there in this shape.
    fn required(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'a>, ModelError> {
        let tensor = self.any(name, shape)?;
        tensor.expect_shape(shape)?;
        Ok(tensor)
    }

    fn any(&self, name: &str, shape: &[usize]) -> Result<StoredTensor<'a>, ModelError> {
        self.folder.stored(name)?.ok_or_else(|| ModelError::Tensor {
            path: self.folder.path().to_path_buf(),
            tensor: name.to_owned(),
            expected: format!("a tensor of shape {shape:?}"),
            found: "none".to_owned(),
        })
    }

    /// Values of a tensor of plain floats.
    pub(crate) fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let tensor = self.required(name, shape)?.plain()?;
        let mut values = vec![0.0; shape.iter().product()];
        dequantize(tensor.format, tensor.data, &mut values)?;
        self.build.uploaded(tensor.data.len());
        Ok(values)
    }

    /// Values of a tensor of 64-bit integers, each below `limit`.
    pub(crate) fn ids(&self, name: &str, shape: &[usize], limit: usize) -> Result<Vec<u32>, ModelError> {
        let tensor = self.required(name, shape)?;
        if tensor.dtype != Dtype::I64 {
            return Err(tensor.error("type I64", format!("type {:?}", tensor.dtype)));
        }
        let mut ids = Vec::with_capacity(tensor.data.len() / 8);
        for bytes in tensor.data.as_chunks::<8>().0 {
            let id = i64::from_le_bytes(*bytes);
            match u32::try_from(id) {
                Ok(small) if (small as usize) < limit => ids.push(small),
                _ => return Err(tensor.error(format!("numbers from 0 to {}", limit - 1), id.to_string())),
            }
        }
        self.build.uploaded(tensor.data.len());
        Ok(ids)
    }

    /// A vector on the device.
    pub(crate) fn vector(&self, name: &str, len: usize) -> Result<Buf, ModelError> {
        Ok(self.device().upload(&self.floats(name, &[len])?)?)
    }

    /// A vector on the device with 1 added to each element: norms that multiply by 1 + weight.
    pub(crate) fn vector_plus_one(&self, name: &str, len: usize) -> Result<Buf, ModelError> {
        let values: Vec<f32> = self.floats(name, &[len])?.iter().map(|value| 1.0 + value).collect();
        Ok(self.device().upload(&values)?)
    }

    /// A matrix of any known format.
    pub(crate) fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Weight, ModelError> {
        self.part(name, (rows, cols), &Cut::Whole)
    }

    /// A part of a matrix of any known format.
    pub(crate) fn part(&self, name: &str, (rows, cols): (usize, usize), cut: &Cut) -> Result<Weight, ModelError> {
        let tensor = self.any(name, &[rows, cols])?;
        if matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            tensor.expect_shape(&[rows, cols])?;
            let tensor = tensor.plain()?;
            let (rows, cols) = cut.of(rows, cols);
            let shape = MatrixShape { rows: rows.len(), cols: cols.len() };
            let bytes = tensor.cut(rows, cols)?;
            let weight = self.device().upload_weight(&WeightData {
                name: &tensor.name,
                shape,
                format: tensor.format,
                bytes: &bytes,
                row_order: None,
            })?;
            self.build.uploaded(bytes.len());
            return Ok(weight);
        }
        let values = self.values(name, rows, cols)?;
        self.upload_part(name, (rows, cols), &values, cut)
    }

    /// The matrix `base.weight`, and `base.bias` where the model has one.
    pub(crate) fn linear(&self, base: &str, rows: usize, cols: usize, bias: bool) -> Result<Linear, ModelError> {
        self.linear_part(base, (rows, cols), &Cut::Whole, bias)
    }

    /// As [`Loader::linear`], a part of it.
    pub(crate) fn linear_part(
        &self,
        base: &str,
        shape: (usize, usize),
        cut: &Cut,
        bias: bool,
    ) -> Result<Linear, ModelError> {
        let name = format!("{base}.weight");
        let weight = match self.narrow(&name, shape, cut)? {
            Some(weight) => weight,
            None => self.part(&name, shape, cut)?,
        };
        let name = format!("{base}.bias");
        if !bias {
            return match self.folder.stored(&name)? {
                Some(tensor) => Err(tensor.error("no bias by the model's configuration", "one")),
                None => Ok(Linear { weight, bias: None }),
            };
        }
        let bias = self.build.share.bias(cut, self.floats(&name, &[shape.0])?);
        Ok(Linear { weight, bias: bias.map(|bias| self.device().upload(&bias)).transpose()? })
    }

    /// Values of a matrix of any known format.
    pub(crate) fn values(&self, name: &str, rows: usize, cols: usize) -> Result<Values, ModelError> {
        let tensor = self.any(name, &[rows, cols])?;
        match tensor.dtype {
            Dtype::F8_E4M3 => {
                tensor.expect_shape(&[rows, cols])?;
                self.fp8(tensor, rows, cols)
            }
            Dtype::I8 | Dtype::U8 => {
                let scales = self.mxfp4_scales(&tensor, rows, cols)?;
                let mut values = Vec::with_capacity(rows * cols);
                mxfp4(tensor.data, scales, &mut values);
                self.build.uploaded(tensor.data.len() + scales.len());
                Ok(Values { values, exact_in_bf16: true })
            }
            dtype => {
                // A type that is none of these is what is wrong, before its shape.
                tensor.plain()?;
                Ok(Values { values: self.floats(name, &[rows, cols])?, exact_in_bf16: dtype == Dtype::BF16 })
            }
        }
    }

    /// A matrix of eight or four bits as it is, where the device computes with such.
    fn narrow(&self, name: &str, (rows, cols): (usize, usize), cut: &Cut) -> Result<Option<Weight>, ModelError> {
        let tensor = self.any(name, &[rows, cols])?;
        let (format, scales) = match tensor.dtype {
            Dtype::F8_E4M3 if self.block == [128, 128] => {
                tensor.expect_shape(&[rows, cols])?;
                (NarrowFormat::Fp8, self.fp8_scales(&tensor, rows, cols)?)
            }
            Dtype::I8 | Dtype::U8 => (NarrowFormat::Mxfp4, Scales::Powers(self.mxfp4_scales(&tensor, rows, cols)?)),
            _ => return Ok(None),
        };
        let narrow = NarrowData {
            name,
            shape: MatrixShape { rows, cols },
            format,
            bytes: tensor.data,
            scales: scales.as_narrow(),
        };
        let weight = match cut {
            Cut::Whole => self.device().upload_narrow(&narrow)?,
            cut => match NarrowPart::of(&narrow, cut) {
                Some(part) => self.device().upload_narrow(&part.as_data(name))?,
                None => None,
            },
        };
        if weight.is_some() {
            self.build.uploaded(tensor.data.len() + scales.bytes());
        }
        Ok(weight)
    }

    /// Scales of four-bit weights: `NAME.scale` in ue8m0.
    fn mxfp4_scales(&self, tensor: &StoredTensor<'a>, rows: usize, cols: usize) -> Result<&'a [u8], ModelError> {
        tensor.expect_shape(&[rows, cols / 2])?;
        expect_whole_blocks(tensor, cols)?;
        let scales = self.required(&scale_name(&tensor.name), &[rows, cols / 32])?;
        if !matches!(scales.dtype, Dtype::F8_E8M0 | Dtype::U8) {
            return Err(scales.error("type F8_E8M0", format!("type {:?}", scales.dtype)));
        }
        Ok(scales.data)
    }

    /// Scales of weights of eight bits, one for each block: `NAME.weight_scale_inv` in f32, or `NAME.scale` in ue8m0.
    fn fp8_scales(&self, tensor: &StoredTensor<'a>, rows: usize, cols: usize) -> Result<Scales<'a>, ModelError> {
        let [block_rows, block_cols] = self.block;
        let shape = [rows.div_ceil(block_rows), cols.div_ceil(block_cols)];
        let inverse = format!("{}_scale_inv", tensor.name);
        if self.has(&inverse)? {
            let scales = self.required(&inverse, &shape)?.plain()?;
            let mut values = vec![0.0; shape.iter().product()];
            dequantize(scales.format, scales.data, &mut values)?;
            return Ok(Scales::Floats(values, scales.data.len()));
        }
        let scales = self.required(&scale_name(&tensor.name), &shape)?;
        if scales.dtype != Dtype::F8_E8M0 {
            return Err(scales.error("type F8_E8M0", format!("type {:?}", scales.dtype)));
        }
        Ok(Scales::Powers(scales.data))
    }

    /// Values of weights of eight bits.
    fn fp8(&self, tensor: StoredTensor<'a>, rows: usize, cols: usize) -> Result<Values, ModelError> {
        let [block_rows, block_cols] = self.block;
        let of_scales = self.fp8_scales(&tensor, rows, cols)?;
        let exact_in_bf16 = matches!(of_scales, Scales::Powers(_));
        let scales: Vec<f32> = match &of_scales {
            Scales::Floats(values, _) => values.clone(),
            Scales::Powers(bytes) => bytes.iter().map(|byte| e8m0(*byte)).collect(),
        };
        let table: Vec<f32> = (0..=255).map(e4m3).collect();
        let across = cols.div_ceil(block_cols);
        let values = tensor
            .data
            .iter()
            .enumerate()
            .map(|(at, byte)| {
                let (row, col) = (at / cols, at % cols);
                table[usize::from(*byte)] * scales[row / block_rows * across + col / block_cols]
            })
            .collect();
        self.build.uploaded(tensor.data.len() + of_scales.bytes());
        Ok(Values { values, exact_in_bf16 })
    }

    /// Uploads values as a matrix.
    pub(crate) fn upload(&self, name: &str, rows: usize, cols: usize, values: &Values) -> Result<Weight, ModelError> {
        let (format, bytes) = values.bytes();
        let shape = MatrixShape { rows, cols };
        Ok(self.device().upload_weight(&WeightData { name, shape, format, bytes: &bytes, row_order: None })?)
    }

    /// Uploads a part of a matrix of `rows` x `cols` values.
    pub(crate) fn upload_part(
        &self,
        name: &str,
        (rows, cols): (usize, usize),
        values: &Values,
        cut: &Cut,
    ) -> Result<Weight, ModelError> {
        if *cut == Cut::Whole {
            return self.upload(name, rows, cols, values);
        }
        let (held, columns) = cut.of(rows, cols);
        let part = values.rows(cols, held.clone()).columns(cols, columns.clone());
        self.upload(name, held.len(), columns.len(), &part)
    }

    /// Uploads values as `groups` matrices, one after another.
    pub(crate) fn upload_groups(
        &self,
        name: &str,
        groups: usize,
        cols: usize,
        values: &Values,
    ) -> Result<GroupedWeight, ModelError> {
        let (format, bytes) = values.bytes();
        let shape = MatrixShape { rows: values.values.len() / cols, cols };
        let data = WeightData { name, shape, format, bytes: &bytes, row_order: None };
        Ok(self.device().upload_groups(&data, groups)?)
    }

    /// The matrix at `index` of a tensor of `[count, rows, cols]` plain floats.
    pub(crate) fn slice(
        &self,
        name: &str,
        (index, count): (usize, usize),
        rows: usize,
        cols: usize,
    ) -> Result<Values, ModelError> {
        let tensor = self.required(name, &[count, rows, cols])?.plain()?;
        let bytes = tensor.data.len() / count;
        let mut values = vec![0.0; rows * cols];
        dequantize(tensor.format, &tensor.data[index * bytes..][..bytes], &mut values)?;
        self.build.uploaded(bytes);
        Ok(Values { values, exact_in_bf16: tensor.format == WeightFormat::BF16 })
    }

    /// The parts at `index` of mxfp4 weights kept as `NAME_blocks` `[count, rows, cols / 32, 16]` and `NAME_scales`: values, and scales.
    fn mxfp4_parts(
        &self,
        name: &str,
        (index, count): (usize, usize),
        rows: usize,
        cols: usize,
    ) -> Result<(&'a [u8], &'a [u8]), ModelError> {
        let blocks = self.required(&format!("{name}_blocks"), &[count, rows, cols / 32, 16])?;
        let scales = self.required(&format!("{name}_scales"), &[count, rows, cols / 32])?;
        expect_whole_blocks(&blocks, cols)?;
        if let Some(other) = [&blocks, &scales].into_iter().find(|tensor| tensor.dtype != Dtype::U8) {
            return Err(other.error("type U8", format!("type {:?}", other.dtype)));
        }
        let (size, scale_size) = (blocks.data.len() / count, scales.data.len() / count);
        Ok((&blocks.data[index * size..][..size], &scales.data[index * scale_size..][..scale_size]))
    }

    /// The matrix at `index` of mxfp4 weights.
    pub(crate) fn mxfp4_slice(
        &self,
        name: &str,
        index: (usize, usize),
        rows: usize,
        cols: usize,
    ) -> Result<Values, ModelError> {
        let (blocks, scales) = self.mxfp4_parts(name, index, rows, cols)?;
        let mut values = Vec::with_capacity(rows * cols);
        mxfp4(blocks, scales, &mut values);
        self.build.uploaded(blocks.len() + scales.len());
        Ok(Values { values, exact_in_bf16: true })
    }

    /// Rows `order` of the matrix at `index` of mxfp4 weights as they are, where the device computes with such.
    pub(crate) fn mxfp4_rows(
        &self,
        name: &str,
        index: (usize, usize),
        (rows, cols): (usize, usize),
        order: impl ExactSizeIterator<Item = usize> + Clone,
    ) -> Result<Option<Weight>, ModelError> {
        let (blocks, scales) = self.mxfp4_parts(name, index, rows, cols)?;
        let picked = |data: &[u8], width: usize| -> Vec<u8> {
            order.clone().flat_map(|row| data[row * width..][..width].iter().copied()).collect()
        };
        let (bytes, scales) = (picked(blocks, cols / 2), picked(scales, cols / 32));
        let shape = MatrixShape { rows: order.len(), cols };
        let scales_of = NarrowScales::Powers(&scales);
        let narrow = NarrowData { name, shape, format: NarrowFormat::Mxfp4, bytes: &bytes, scales: scales_of };
        let weight = self.device().upload_narrow(&narrow)?;
        if weight.is_some() {
            self.build.uploaded(bytes.len() + scales.len());
        }
        Ok(weight)
    }
}

/// Scales of blocks.
enum Scales<'a> {
    /// Values, and how many bytes they have in the file.
    Floats(Vec<f32>, usize),
    /// As ue8m0.
    Powers(&'a [u8]),
}

impl Scales<'_> {
    fn as_narrow(&self) -> NarrowScales<'_> {
        match self {
            Self::Floats(values, _) => NarrowScales::Floats(values),
            Self::Powers(bytes) => NarrowScales::Powers(bytes),
        }
    }

    /// Bytes in the file.
    fn bytes(&self) -> usize {
        match self {
            Self::Floats(_, bytes) => *bytes,
            Self::Powers(bytes) => bytes.len(),
        }
    }
}

impl Values {
    /// All of them, one after another.
    pub(crate) fn joined(parts: impl Iterator<Item = Values>) -> Values {
        let mut all = Values { values: Vec::new(), exact_in_bf16: true };
        for part in parts {
            all.exact_in_bf16 &= part.exact_in_bf16;
            all.values.extend(part.values);
        }
        all
    }

    /// The smallest format that holds them exactly, and their bytes in it.
    fn bytes(&self) -> (WeightFormat, Vec<u8>) {
        if self.exact_in_bf16 {
            (WeightFormat::BF16, bf16_bytes(&self.values))
        } else {
            (WeightFormat::F32, self.values.iter().flat_map(|value| value.to_le_bytes()).collect())
        }
    }

    /// Rows `order[i]` of these, each `cols` wide.
    pub(crate) fn rows(&self, cols: usize, order: impl Iterator<Item = usize>) -> Values {
        let values = order.flat_map(|row| self.values[row * cols..][..cols].iter().copied()).collect();
        Values { values, exact_in_bf16: self.exact_in_bf16 }
    }

    /// What `cut` keeps of `rows` rows of `cols`.
    pub(crate) fn part(self, (rows, cols): (usize, usize), cut: &Cut) -> Values {
        if *cut == Cut::Whole {
            return self;
        }
        let (rows, columns) = cut.of(rows, cols);
        self.rows(cols, rows).columns(cols, columns)
    }

    /// Columns of these rows, each `cols` wide.
    fn columns(&self, cols: usize, part: Range<usize>) -> Values {
        let values = self.values.chunks_exact(cols).flat_map(|row| row[part.clone()].iter().copied()).collect();
        Values { values, exact_in_bf16: self.exact_in_bf16 }
    }

    /// The transpose of `rows` rows of `cols`.
    pub(crate) fn transposed(&self, rows: usize, cols: usize) -> Values {
        let values = (0..cols).flat_map(|col| (0..rows).map(move |row| self.values[row * cols + col])).collect();
        Values { values, exact_in_bf16: self.exact_in_bf16 }
    }
}

/// Rows of four-bit values are whole blocks.
fn expect_whole_blocks(tensor: &StoredTensor<'_>, cols: usize) -> Result<(), ModelError> {
    if cols.is_multiple_of(32) {
        return Ok(());
    }
    Err(tensor.error("rows of a multiple of 32 values by the model's configuration", format!("rows of {cols}")))
}

/// `X.scale` for `X.weight`.
fn scale_name(name: &str) -> String {
    format!("{}.scale", name.strip_suffix(".weight").unwrap_or(name))
}
