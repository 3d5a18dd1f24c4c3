// Where the values of a workgroup's column lie. With COLUMNS a kernel takes a column for each gl_WorkGroupID.y, of several sequences, each of
// which keeps its state in a slot; with DRAFTS the columns are of one sequence, one position after the other; without either there is one
// column.
//
//   MANY_COLUMNS        defined with COLUMNS or DRAFTS
//   COLUMN              the workgroup's column
//   IN_COLUMN(i, size)  index of value i of the column, where every column has `size` values
//   IN_SLOT(i, size)    index of value i of the column's sequence, where every slot has `size` values; with COLUMNS needs a buffer
//                       `int slots[]`
//
// Defines: COLUMNS or DRAFTS 1, or nothing

#if defined(COLUMNS) || defined(DRAFTS)
#define MANY_COLUMNS
#define COLUMN gl_WorkGroupID.y
#define IN_COLUMN(i, size) (COLUMN * (size) + (i))
#else
#define COLUMN 0
#define IN_COLUMN(i, size) (i)
#endif
#ifdef COLUMNS
#define IN_SLOT(i, size) (uint(slots[COLUMN]) * (size) + (i))
#else
#define IN_SLOT(i, size) (i)
#endif
