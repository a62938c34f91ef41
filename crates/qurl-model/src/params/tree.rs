//! Structs of leaves: one list of fields makes the struct and its walks.
//!
//! A field is a `leaf(T)`, an `optional(Option<T>)` leaf, an `mlp(..)`, an optional tree `adapter(..)`, or
//! trees in a row: the `layers(..)`, their `adapters(..)`.

/// Declares a tree and its walks: `map_leaves` (consuming, stops at the first error), `as_ref`, `as_mut` and
/// `layout`.
macro_rules! tree {
    (
        $(#[$doc:meta])* pub struct $name:ident {
            $($(#[$field_doc:meta])* $field:ident: $kind:ident($type:ty),)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name<T> {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl<T> $name<T> {
            /// The same tree with `f` applied to every leaf in order; stops at the first error.
            fn map_leaves<U, E>(self, f: &mut impl FnMut(T) -> Result<U, E>) -> Result<$name<U>, E> {
                Ok($name { $($field: $crate::params::tree::map_field!($kind, self.$field, f),)* })
            }

            /// The same tree over borrowed leaves.
            pub fn as_ref(&self) -> $name<&T> {
                $name { $($field: $crate::params::tree::borrow_field!($kind, self.$field),)* }
            }

            /// The same tree over mutably borrowed leaves.
            pub fn as_mut(&mut self) -> $name<&mut T> {
                $name { $($field: $crate::params::tree::borrow_field_mut!($kind, self.$field),)* }
            }

            /// Appends the names of the fields that there are.
            fn layout(&self, to: &mut Vec<&'static str>) {
                $($crate::params::tree::field_layout!($kind, $field, self.$field, to);)*
            }
        }
    };
}

macro_rules! map_field {
    (leaf, $value:expr, $f:ident) => {
        $f($value)?
    };
    (optional, $value:expr, $f:ident) => {
        $value.map(&mut *$f).transpose()?
    };
    (mlp, $value:expr, $f:ident) => {
        $value.try_map($f)?
    };
    (adapter, $value:expr, $f:ident) => {
        $value.map(|adapter| adapter.map_leaves($f)).transpose()?
    };
    (layers, $value:expr, $f:ident) => {
        $value.into_iter().map(|layer| layer.map_leaves($f)).collect::<Result<_, E>>()?
    };
    (adapters, $value:expr, $f:ident) => {
        $crate::params::tree::map_field!(layers, $value, $f)
    };
}

macro_rules! borrow_field {
    (leaf, $value:expr) => {
        &$value
    };
    (optional, $value:expr) => {
        $value.as_ref()
    };
    (mlp, $value:expr) => {
        $value.as_ref()
    };
    (adapter, $value:expr) => {
        $value.as_ref().map(Adapter::as_ref)
    };
    (layers, $value:expr) => {
        $value.iter().map(LayerParams::as_ref).collect()
    };
    (adapters, $value:expr) => {
        $value.iter().map(LayerAdapters::as_ref).collect()
    };
}

macro_rules! borrow_field_mut {
    (leaf, $value:expr) => {
        &mut $value
    };
    (optional, $value:expr) => {
        $value.as_mut()
    };
    (mlp, $value:expr) => {
        $value.as_mut()
    };
    (adapter, $value:expr) => {
        $value.as_mut().map(Adapter::as_mut)
    };
    (layers, $value:expr) => {
        $value.iter_mut().map(LayerParams::as_mut).collect()
    };
    (adapters, $value:expr) => {
        $value.iter_mut().map(LayerAdapters::as_mut).collect()
    };
}

macro_rules! field_layout {
    (leaf, $field:ident, $value:expr, $to:ident) => {
        $to.push(stringify!($field))
    };
    (optional, $field:ident, $value:expr, $to:ident) => {
        if $value.is_some() {
            $to.push(stringify!($field));
        }
    };
    (mlp, $field:ident, $value:expr, $to:ident) => {
        $value.layout($to)
    };
    (adapter, $field:ident, $value:expr, $to:ident) => {
        if let Some(adapter) = &$value {
            $to.push(stringify!($field));
            adapter.layout($to);
        }
    };
    (layers, $field:ident, $value:expr, $to:ident) => {
        $value.iter().for_each(|layer| layer.layout($to))
    };
    (adapters, $field:ident, $value:expr, $to:ident) => {
        $value.iter().for_each(|layer| layer.layout($to))
    };
}

pub(super) use {borrow_field, borrow_field_mut, field_layout, map_field, tree};
