//! What a device gives out: opaque, with what everybody may know of it.

macro_rules! handle {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $ty:ty),* $(,)? }) => {
        $(#[$doc])*
        pub struct $name { $($field: $ty,)* inner: Box<dyn std::any::Any + Send + Sync> }

        impl $name {
            /// Wraps what a device keeps behind the handle. For implementers of [`crate::Device`].
            pub fn from_parts($($field: $ty,)* inner: Box<dyn std::any::Any + Send + Sync>) -> Self {
                Self { $($field,)* inner }
            }

            $($(#[$field_doc])* pub fn $field(&self) -> $ty { self.$field })*

            /// What a device of the right kind keeps behind the handle.
            pub fn downcast_ref<T: 'static>(&self) -> Option<&T> {
                self.inner.downcast_ref()
            }

            /// What a device of the right kind keeps behind the handle.
            pub fn downcast_mut<T: 'static>(&mut self) -> Option<&mut T> {
                self.inner.downcast_mut()
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name))
                    $(.field(stringify!($field), &self.$field))*
                    .finish_non_exhaustive()
            }
        }
    };
}

pub(crate) use handle;
