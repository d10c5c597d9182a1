//! Declarations of messages.

use super::pack::{Decode, Encode, Malformed, Reader, Shape, Writer, literal};

/// Declares structs whose fields travel in the order in which they stand.
macro_rules! messages {
    ($($(#[$meta:meta])* pub struct $name:ident $(<$lt:lifetime>)? { $($(#[$fmeta:meta])* $field:ident: $ty:ty,)+ })+) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub struct $name $(<$lt>)? { $($(#[$fmeta])* pub $field: $ty,)+ }

        impl $(<$lt>)? $crate::wire::Shape for $name $(<$lt>)? {
            fn literal(out: &mut Vec<u8>) {
                $crate::wire::message::open_struct(out);
                $(<$ty as $crate::wire::Shape>::literal(out);)+
                $crate::wire::message::close(out);
            }
        }
        impl $(<$lt>)? $crate::wire::Encode for $name $(<$lt>)? {
            fn longest(&self) -> usize {
                0 $(.max($crate::wire::Encode::longest(&self.$field)))+
            }
            fn encode(&self, out: &mut $crate::wire::Writer) {
                $($crate::wire::Encode::encode(&self.$field, out);)+
            }
        }
        $crate::wire::message::decode_struct!($name $(<$lt>)? { $($field: $ty,)+ });
    )+};
}
pub(crate) use messages;

macro_rules! decode_struct {
    ($name:ident { $($field:ident: $ty:ty,)+ }) => {
        impl $crate::wire::Decode<'_> for $name {
            fn decode(input: &mut $crate::wire::Reader<'_>) -> Result<Self, $crate::wire::Malformed> {
                Ok($name { $($field: $crate::wire::Decode::decode(input)?,)+ })
            }
        }
    };
    ($name:ident <$lt:lifetime> { $($field:ident: $ty:ty,)+ }) => {
        impl<$lt> $crate::wire::Decode<$lt> for $name<$lt> {
            fn decode(input: &mut $crate::wire::Reader<$lt>) -> Result<Self, $crate::wire::Malformed> {
                Ok($name { $($field: $crate::wire::Decode::decode(input)?,)+ })
            }
        }
    };
}
pub(crate) use decode_struct;

/// Declares an enumeration whose alternatives each carry a struct: a variant, told apart by a number.
macro_rules! variant {
    ($(#[$meta:meta])* pub enum $name:ident { $($(#[$vmeta:meta])* $alternative:ident($ty:ty) = $index:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq)]
        pub enum $name { $($(#[$vmeta])* $alternative($ty),)+ }

        impl $crate::wire::Shape for $name {
            fn literal(out: &mut Vec<u8>) {
                $crate::wire::message::open_variant(out);
                $(<$ty as $crate::wire::Shape>::literal(out);)+
                $crate::wire::message::close(out);
            }
        }
        impl $crate::wire::Encode for $name {
            fn longest(&self) -> usize {
                match self { $($name::$alternative(value) => $crate::wire::Encode::longest(value),)+ }
            }
            fn encode(&self, out: &mut $crate::wire::Writer) {
                match self {
                    $($name::$alternative(value) => {
                        out.raw(&[$index]);
                        $crate::wire::Encode::encode(value, out);
                    })+
                }
            }
        }
        impl $crate::wire::Decode<'_> for $name {
            fn decode(input: &mut $crate::wire::Reader<'_>) -> Result<Self, $crate::wire::Malformed> {
                let at = input.at();
                match input.array::<1>(stringify!($name))?[0] {
                    $($index => Ok($name::$alternative($crate::wire::Decode::decode(input)?)),)+
                    other => Err($crate::wire::Malformed::Value { what: stringify!($name), at, value: u64::from(other) }),
                }
            }
        }
    };
}
pub(crate) use variant;

/// Declares numbers of 4 bytes with names. A number without a name stays what it is.
macro_rules! numbers {
    ($(#[$meta:meta])* pub $name:ident { $($(#[$vmeta:meta])* $value:ident = $number:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name(pub i32);

        impl $name { $($(#[$vmeta])* pub const $value: $name = $name($number);)+ }

        impl $crate::wire::Shape for $name {
            fn literal(out: &mut Vec<u8>) {
                i32::literal(out);
            }
        }
        impl $crate::wire::Encode for $name {
            fn encode(&self, out: &mut $crate::wire::Writer) {
                self.0.encode(out);
            }
        }
        impl $crate::wire::Decode<'_> for $name {
            fn decode(input: &mut $crate::wire::Reader<'_>) -> Result<Self, $crate::wire::Malformed> {
                i32::decode(input).map($name)
            }
        }
    };
}
pub(crate) use numbers;

pub(crate) fn open_struct(out: &mut Vec<u8>) {
    out.push(literal::STRUCT);
}
pub(crate) fn open_variant(out: &mut Vec<u8>) {
    out.push(literal::VARIANT);
}
pub(crate) fn close(out: &mut Vec<u8>) {
    out.push(literal::END);
}

/// Two or more arguments travel as a struct of them; so do structs that have no name here.
macro_rules! arguments {
    ($($name:ident)+) => {
        impl<$($name: Shape),+> Shape for ($($name,)+) {
            fn literal(out: &mut Vec<u8>) {
                open_struct(out);
                $($name::literal(out);)+
                close(out);
            }
        }
        impl<$($name: Encode),+> Encode for ($($name,)+) {
            fn longest(&self) -> usize {
                #[allow(non_snake_case, reason = "the type parameters name the places")]
                let ($($name,)+) = self;
                0 $(.max($name.longest()))+
            }
            fn encode(&self, out: &mut Writer) {
                #[allow(non_snake_case, reason = "the type parameters name the places")]
                let ($($name,)+) = self;
                $($name.encode(out);)+
            }
        }
        impl<'a, $($name: Decode<'a>),+> Decode<'a> for ($($name,)+) {
            fn decode(input: &mut Reader<'a>) -> Result<Self, Malformed> {
                Ok(($($name::decode(input)?,)+))
            }
        }
    };
}
arguments!(A);
arguments!(A B);
arguments!(A B C);
arguments!(A B C D);
arguments!(A B C D E);
arguments!(A B C D E F);
arguments!(A B C D E F G);
