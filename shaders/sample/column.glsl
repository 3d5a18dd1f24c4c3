// Where the values of a workgroup's column lie. With COLUMNS a kernel takes a column for each gl_WorkGroupID.y, of several sequences, each of
// which keeps its state in a slot; without it there is one column, of one sequence.
//
//   COLUMN              the workgroup's column
//   IN_COLUMN(i, size)  index of value i of the column, where every column has `size` values
//   IN_SLOT(i, size)    index of value i of the column's sequence, where every slot has `size` values; needs a buffer `int slots[]`
//
// Defines: COLUMNS 1 or nothing

#ifdef COLUMNS
#define COLUMN gl_WorkGroupID.y
#define IN_COLUMN(i, size) (COLUMN * (size) + (i))
#define IN_SLOT(i, size) (uint(slots[COLUMN]) * (size) + (i))
#else
#define COLUMN 0
#define IN_COLUMN(i, size) (i)
#define IN_SLOT(i, size) (i)
#endif
